"""Benchmarks behind `pageray bench`: what is measured, apart from how it is asked for."""
