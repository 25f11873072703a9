"""The definition of dispatch and combine in plain torch. It imports no native code, because it tests that
code.
"""
