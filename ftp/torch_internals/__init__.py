"""What ftp takes from torch beside its public names: private names, the compiler's late start, and
what torch's errors say in their text alone.
"""
