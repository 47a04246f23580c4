"""Text: vocabularies and tokenizers."""
