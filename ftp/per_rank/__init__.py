"""Per-rank code inside a global program: ``ftp.local``, its gradient and its rule."""
