"""Bridges to training frameworks. Nothing here is imported by `import rtopk`; name the one you use."""
