"""The runtime of kernels: compiler, device, memory, graphs, and the simulator."""
