"""`mpitrain dashboard`: the runs of this user on one page, those that run and those that have ended.

    records (metrics.jsonl, run.json) ─> index (SQLite) ─┐
                                                         ├─> server ─> pages/ in the browser
    sockets of launchers ─> live jobs ───────────────────┤
    results that commands have kept, checkpoints ────────┘

The records are authoritative. The index is made from them, and can be removed at any time. Starlette and uvicorn are
imported here and nowhere else, and no rank imports this package.
"""
