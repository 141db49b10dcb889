"""What people use beside the compiler: the command line, the report of `explain`, benchmarks, `doctor`.

May import everything below; nothing below imports it.
"""
