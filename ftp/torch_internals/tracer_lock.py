"""A lock for traces and compilation: torch.fx patches modules while it traces, and the compilation
of kernels together patches inductor.
"""

import threading

TRACING = threading.RLock()
