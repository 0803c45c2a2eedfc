"""For the docs site: examples in docstrings (`>>>`) become code blocks, not quotations in quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>>)\S.*\n?|^\.\.\. .*\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fence every example of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            fenced = EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = fenced
