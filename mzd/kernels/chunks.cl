// Owns how kernels find the chunks of a layer: in a table of their addresses, or among their arguments.
//
// CHUNK_ARGUMENTS is defined where kernels cannot follow addresses. Then a launch of attention takes eight
// consecutive chunks as arguments, from number `launch_chunk` of the context on, and a long context takes
// several launches. What writes K and V takes one chunk, and the tokens of that chunk.

#include "places.cl"

// Attention's list of parameters ends with CHUNK_PARAMETERS, behind four pointers; AT_CHUNKS stands with its
// other ATs, and CHUNK(number) is where a chunk begins.
#ifdef CHUNK_ARGUMENTS
typedef global const half* Chunk;
#define CHUNK_PARAMETERS                                                                              \
    Chunk chunk0, Chunk chunk1, Chunk chunk2, Chunk chunk3, Chunk chunk4, Chunk chunk5, Chunk chunk6, \
        Chunk chunk7, const int launch_chunk PLACES12
#define AT_CHUNKS                                                                            \
    AT(chunk0, 4); AT(chunk1, 5); AT(chunk2, 6); AT(chunk3, 7); AT(chunk4, 8); AT(chunk5, 9); \
    AT(chunk6, 10); AT(chunk7, 11)

static inline Chunk one_of_four(int i, Chunk a, Chunk b, Chunk c, Chunk d) {
    return i < 2 ? (i < 1 ? a : b) : (i < 3 ? c : d);
}

#define CHUNK(number)                                                           \
    ((number) - launch_chunk < 4                                                \
         ? one_of_four((number) - launch_chunk, chunk0, chunk1, chunk2, chunk3) \
         : one_of_four((number) - launch_chunk - 4, chunk4, chunk5, chunk6, chunk7))
#else
#define CHUNK_PARAMETERS global const ulong* chunk_table PLACES5
#define AT_CHUNKS AT(chunk_table, 4)
#define CHUNK(number) ((global const half*)chunk_table[number])
#endif

// The chunk of the token at `position`, to write to; `chunks` is the table, or that chunk itself.
static inline global half* chunk_of(global void* chunks, int position) {
#ifdef CHUNK_ARGUMENTS
    return chunks;
#else
    return (global half*)((global const ulong*)chunks)[position / CHUNK_TOKENS];
#endif
}
