/* Runs matmul_int8 or gemv_int8 as plain functions: operands from stdin, y to stdout. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void gemv_int8(const uint8_t *weights, const float *x, float *y, int rows, int cols, int accumulate, int *record);
void matmul_int8(const uint8_t *weights, const float *x, float *y, int rows, int cols, int accumulate, int *records,
                 int tokens, int block_tokens);

static size_t group[2], groups[2];

size_t _Z12get_group_idj(unsigned dimension) { return group[dimension]; }
size_t _Z14get_num_groupsj(unsigned dimension) { return groups[dimension]; }

struct operands {
    int32_t rows, cols, tokens, weights_bytes, row_groups, block_tokens;
};

static void *read_exactly(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == NULL || fread(memory, 1, bytes, stdin) != bytes)
        exit(1);
    return memory;
}

int main(void)
{
    const struct operands *of = read_exactly(sizeof *of);
    const uint8_t *weights = read_exactly((size_t)of->weights_bytes);
    const float *x = read_exactly(sizeof *x * (size_t)(of->tokens * of->cols));
    const size_t results = (size_t)(of->tokens * of->rows);
    float *y = calloc(results, sizeof *y);
    int *records = calloc((size_t)of->block_tokens, (size_t)of->cols * 4);
    groups[0] = (size_t)of->row_groups;
    groups[1] = (size_t)((of->tokens + of->block_tokens - 1) / of->block_tokens);
    for (group[1] = 0; group[1] < groups[1]; group[1]++)
        for (group[0] = 0; group[0] < groups[0]; group[0]++)
            if (of->tokens == 1)
                gemv_int8(weights, x, y, of->rows, of->cols, 0, records);
            else
                matmul_int8(weights, x, y, of->rows, of->cols, 0, records, of->tokens, of->block_tokens);
    return fwrite(y, sizeof *y, results, stdout) == results ? 0 : 1;
}
