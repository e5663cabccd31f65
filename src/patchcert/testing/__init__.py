"""Conformance suites that anybody can run on their own certifier, threat or attack; needs no test framework.

`patchcert.testing.strategies` offers Hypothesis strategies and is imported only by those who want them.
"""
