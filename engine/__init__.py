"""SpecPilot's engine: decoder, drafters, judge and search. Imports no web framework."""

__version__ = "0.1.0"
