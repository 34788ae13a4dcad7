"""Vocabulary that every part of Triptych shares: config, layouts, handles, messages, errors."""
