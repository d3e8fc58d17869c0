"""``python -m robustrl``: the command line."""

from .cli import main

raise SystemExit(main())
