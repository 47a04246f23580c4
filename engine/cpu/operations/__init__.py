"""The operations of a pass on the CPU: which kernels compute them, on which items."""
