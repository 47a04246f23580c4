"""Text: vocabularies, tokenizers, and chat templates in their sandbox."""
