"""HTTP <-> requests. The only async code; nothing here loads torch."""
