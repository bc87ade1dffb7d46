"""The processes of a job: how they start, meet, agree, share work and end. May import recipes and data."""
