"""A parameter server and its workers, which may come and go. Read first: work_units, coordinator, worker."""
