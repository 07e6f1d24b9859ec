"""A rank that waits in vain for others ends itself, and says where; ranks report to the elastic agent."""
