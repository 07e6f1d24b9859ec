"""A rank that waits too long for others ends itself, and says where; ranks report to the elastic agent."""
