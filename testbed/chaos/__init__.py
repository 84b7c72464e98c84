"""Real faults for a job that runs, undone in time, and a report of how the job continued.

plan: which fault, when ─> conduct: which victim ─> saboteur on a host, outages of a bed ─> episode ─> report
"""
