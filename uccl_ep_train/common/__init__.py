"""Shared by all folders; imports only `errors`."""
