"""What only one thread may do at a time."""

from __future__ import annotations

import threading

COMPILING = threading.RLock()
"""Held while a model is traced, compiled or checked.

A model that is traced has fake weights for that time, fake tensors are not made for several threads, and the
modes in which torch exports are on one stack for all threads, off which checks take them. Locks of single
objects are taken after this one.
"""
