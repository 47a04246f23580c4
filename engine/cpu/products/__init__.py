"""Matrix products on the CPU: records of eight rows, the integers in them, and the products with activations."""
