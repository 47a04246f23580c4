"""What kernels run on: compiler, device, memory, graphs, and the simulator."""
