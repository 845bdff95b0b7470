"""torch beside its public names: the private names that ftp uses, deferred loading of the compiler,
and the meaning of error texts.
"""
