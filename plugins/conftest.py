"""What the plugins' own tests share: they run from the repository as they would from anywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The template is not installed here. tests/plugin/test_template.py copies, renames, installs and tests it.
collect_ignore = ["_template"]
