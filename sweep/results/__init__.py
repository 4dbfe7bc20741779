"""Facts of a study and exact maths on them: metrics, records, operating points, fronts."""
