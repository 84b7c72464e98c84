"""Real faults for a job that runs, undone in time, and a report of how the job went on.

plan: which fault when ─> conduct: on whom ─> saboteur on a host, or outages of a bed ─> timeline ─> report, picture
"""
