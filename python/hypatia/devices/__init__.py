"""What is known about the machine: its processor, its GPUs, and where the CUDA libraries are.

May import only the modules beside the packages: options, errors, the store.
"""
