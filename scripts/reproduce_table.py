#!/usr/bin/env python3
"""Reproduce a table: the console script ``featcal-table``, for a checkout. See ``--help``."""

from featcal_fusionbench.sweeps.cli import main

raise SystemExit(main())
