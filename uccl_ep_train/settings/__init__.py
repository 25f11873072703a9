"""What a buffer can be told, by arguments or the environment. Imports neither torch nor native code."""
