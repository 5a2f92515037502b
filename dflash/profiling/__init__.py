"""Stage timers and what becomes of them. Imports nothing else of dflash."""
