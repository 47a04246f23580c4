"""A backend of several devices that share every layer."""
