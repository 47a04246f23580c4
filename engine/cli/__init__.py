"""What the command lines share: flags, reports, conversations."""
