"""Running passes on the CPU: recorded programs, a team of threads, and their memory."""
