// Owns how helper functions that ask for the work-item's place (get_local_id and so on) are declared.
//
// Where such a function is not inlined PoCL 3.1 gives it a wrong place, and left to itself it inlines short
// functions only.
#define INLINED static inline __attribute__((always_inline))
