"""What number formats of matrix products cost, and what they gain.

    make targets && .venv/bin/python -m benchmarks.formats --json benchmarks/results

Everything but the trainings is read from programs that are compiled for accelerators.
Exact: no clock, no device. Nobody has timed these programs.
"""
