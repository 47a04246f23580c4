"""What this machine gives to a process: cores, memory, and folders whose contents it can trust."""
