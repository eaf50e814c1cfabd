"""Ops implementations. `cpu` is the compiled one; `reference` is numpy, for tests."""
