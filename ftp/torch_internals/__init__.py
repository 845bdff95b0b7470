"""torch's private parts: private names that several files of ftp use, by subject, each with
the release it was read at; the check that torch has them; deferred loading of the compiler, and the
meaning of error texts.
"""
