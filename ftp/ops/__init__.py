"""torch ops that ftp defines, and their native code."""
