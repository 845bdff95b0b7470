"""What all tests share: what is found about ops by trial is kept apart from the user's own
cache.
"""

import os
import tempfile

os.environ.setdefault("FTP_CACHE", tempfile.mkdtemp(prefix="ftp-cache-"))
