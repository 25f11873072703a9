"""Configuration of a buffer, by arguments or the environment. Imports neither torch nor native code."""
