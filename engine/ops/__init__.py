"""What forward passes are written in: the operations of a backend, and the descriptions that they take."""
