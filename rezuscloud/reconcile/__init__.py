"""The engine room: makes declared tenants true, one run at a time per tenant."""
