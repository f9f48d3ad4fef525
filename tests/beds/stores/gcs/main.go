// A Google Cloud Storage server for tests: fake-gcs-server in memory, behind the verbs of Google's XML
// API that it lacks and that obstore writes with.
//
// obstore creates a file by `PUT /bucket/object` with the header `x-goog-if-generation-match: 0`.
// fake-gcs-server takes uploads by the JSON API only, where the same condition is the query parameter
// `ifGenerationMatch`. This front translates the one to the other and nothing else; the condition is then
// decided by fake-gcs-server, under its lock. A PUT without the header has no condition.
//
// Multipart uploads (`POST ?uploads`, `PUT ?partNumber=&uploadId=`, `POST ?uploadId=`, `DELETE ?uploadId=`)
// keep their parts here and become one upload when they are completed, in the order that the client lists.
package main

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	address := flag.String("address", "127.0.0.1:0", "host:port to listen at")
	bucket := flag.String("bucket", "bucket", "bucket to create")
	flag.Parse()

	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener: true,
		PublicHost: listener.Addr().String(),
	})
	if err != nil {
		log.Fatal(err)
	}
	server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: *bucket})
	fmt.Printf("listening at %s\n", listener.Addr())
	log.Fatal(http.Serve(listener, front(server.HTTPHandler(), listener.Addr().String())))
}

// uploads are the multipart uploads that have begun: by id, then by number of the part.
var (
	lock    sync.Mutex
	uploads = map[string]map[int][]byte{}
	begun   int
)

// front answers `PUT /bucket/object` by a JSON API upload of the same body under the same condition. All
// requests are for host, by whatever way they came: fake-gcs-server knows its own name only.
func front(next http.Handler, host string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Host = host
		bucket, object, found := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		query := r.URL.Query()
		ours := found && bucket != "upload" && bucket != "_internal"
		switch {
		case ours && r.Method == http.MethodPost && query.Has("uploads"):
			lock.Lock()
			begun++
			id := fmt.Sprintf("upload-%d", begun)
			uploads[id] = map[int][]byte{}
			lock.Unlock()
			fmt.Fprintf(w, "<InitiateMultipartUploadResult><Bucket>%s</Bucket><Key>k</Key>"+
				"<UploadId>%s</UploadId></InitiateMultipartUploadResult>", bucket, id)
		case ours && query.Has("uploadId"):
			multipart(w, r, next, bucket, object)
		case ours && r.Method == http.MethodPut:
			single(w, r, next, bucket, object, r.Header.Get("x-goog-if-generation-match"))
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// single is one upload of the whole body of r.
func single(w http.ResponseWriter, r *http.Request, next http.Handler, bucket, object, generation string) {
	query := url.Values{"uploadType": {"media"}, "name": {object}}
	if generation != "" {
		query.Set("ifGenerationMatch", generation)
	}
	upload := r.Clone(r.Context())
	upload.Method = http.MethodPost
	upload.URL = &url.URL{Path: "/upload/storage/v1/b/" + bucket + "/o", RawQuery: query.Encode()}
	upload.RequestURI = upload.URL.RequestURI()
	w.Header().Set("ETag", `"unknown"`) // obstore wants one; the JSON API has it in the body
	next.ServeHTTP(w, upload)
}

// multipart is a part, the completion or the abortion of an upload that has begun.
func multipart(w http.ResponseWriter, r *http.Request, next http.Handler, bucket, object string) {
	query := r.URL.Query()
	id := query.Get("uploadId")
	body, err := io.ReadAll(r.Body)
	lock.Lock()
	parts, known := uploads[id]
	lock.Unlock()
	if err != nil || !known {
		http.Error(w, "NoSuchUpload", http.StatusNotFound)
		return
	}
	switch r.Method {
	case http.MethodPut:
		number, _ := strconv.Atoi(query.Get("partNumber"))
		lock.Lock()
		parts[number] = body
		lock.Unlock()
		w.Header().Set("ETag", fmt.Sprintf(`"part-%d"`, number))
	case http.MethodDelete:
		lock.Lock()
		delete(uploads, id)
		lock.Unlock()
		w.WriteHeader(http.StatusNoContent)
	case http.MethodPost:
		var asked struct {
			Part []struct{ PartNumber int }
		}
		if err := xml.Unmarshal(body, &asked); err != nil {
			http.Error(w, "MalformedXML", http.StatusBadRequest)
			return
		}
		var whole []byte
		lock.Lock()
		for _, part := range asked.Part {
			whole = append(whole, parts[part.PartNumber]...)
		}
		delete(uploads, id)
		lock.Unlock()
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(whole)), int64(len(whole))
		result := &quiet{header: http.Header{}, status: http.StatusOK}
		single(result, r, next, bucket, object, "")
		if result.status != http.StatusOK {
			http.Error(w, "InternalError", result.status)
			return
		}
		fmt.Fprint(w, `<CompleteMultipartUploadResult><ETag>"whole"</ETag></CompleteMultipartUploadResult>`)
	}
}

// quiet takes an answer of the JSON API of which only the status matters.
type quiet struct {
	header http.Header
	status int
}

func (q *quiet) Header() http.Header         { return q.header }
func (q *quiet) Write(b []byte) (int, error) { return len(b), nil }
func (q *quiet) WriteHeader(status int)      { q.status = status }
