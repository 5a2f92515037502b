"""Stage timers, gauges and spans, and what becomes of them. Imports nothing else of dflash."""
