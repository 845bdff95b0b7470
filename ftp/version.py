"""The version of ftp."""

__version__ = "0.1.0"
