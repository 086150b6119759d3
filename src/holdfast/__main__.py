"""`python -m holdfast`, the form that launchers start on every rank."""

import sys

from holdfast.cli import main

sys.exit(main())
