"""The operations of a backend, in which forward passes are written, and the parameters of these operations."""
