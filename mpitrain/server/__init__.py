"""A parameter server and its workers, which come and go. To read first: work_units, coordinator, worker."""
