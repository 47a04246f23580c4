"""What the command lines share: flags, conversations, reports, tables."""
